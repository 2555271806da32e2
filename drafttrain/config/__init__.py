"""From the command line and yaml to the dataclasses that every command takes."""
