"""A separate process that writes the rows of a parquet file as lines of JSON.

A parquet file of a few kilobytes can expand to any size, in one page of it, so the kernel limits
the memory of the process that decodes it. Run by path, without the environment's secrets.
"""

import json
import resource
import sys

MEMORY = 2 << 30  # bytes of this process
BATCH = 16  # rows decoded at a time: each may have as much as a record may


def main(file: str) -> None:
    """Write each row as a line; columns of bytes (images, audio) are not read."""
    import pyarrow.types
    from pyarrow.parquet import ParquetFile

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parquet = ParquetFile(file)
    binary = pyarrow.types.is_binary, pyarrow.types.is_large_binary
    fields = [field for field in parquet.schema_arrow if not any(is_(field.type) for is_ in binary)]
    names = [field.name for field in fields]
    for batch in parquet.iter_batches(BATCH, columns=names, use_threads=False):
        for row in batch.to_pylist():
            sys.stdout.write(json.dumps(row, default=str) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BrokenPipeError:  # whoever reads the lines has enough
        sys.stderr.close()
    except MemoryError:
        sys.exit(f"a few rows take more than {MEMORY >> 30} GiB")
    except Exception as error:  # pyarrow's errors of damaged files are of many classes
        sys.exit(" ".join(str(error).split())[:500] or type(error).__name__)
