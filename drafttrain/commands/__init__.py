"""One function per command: typed configuration -> objects -> worker. The architecture diagram."""
