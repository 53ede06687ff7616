"""Shows what is in a checkpoint, or in what two checkpoints differ; reads only, and runs nothing that a file brings.

python tools/ckpts/inspect_checkpoints.py runs/a                      names, shapes, dtypes, geometry, settings
python tools/ckpts/inspect_checkpoints.py runs/a --attributes args/hidden_size lr_scheduler
python tools/ckpts/inspect_checkpoints.py runs/a runs/b --diff        only what differs; exit code 1 if anything does
"""

import argparse
import os
import sys
from typing import Any, List, Optional

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, when imported, would look for a GPU and say so

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))

from megatron.checkpointing import inspection  # noqa: E402
from megatron.checkpointing.model_settings import checkpoint_folder  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.checkpointing.safe_load import load_file  # noqa: E402
from megatron.entry import run_main  # noqa: E402
from megatron.errors import CheckpointError  # noqa: E402
from tools.ckpts.local_ranks import describe_process  # noqa: E402


def show(path: str) -> None:
    """Print one checkpoint, or the contents of one .pt file."""
    if os.path.isfile(path):
        show_file(path)
        return
    folder = checkpoint_folder(path)
    reader = CheckpointReader(folder)
    print(folder)
    for label, text in {**inspection.summary(reader), **inspection.settings(reader)}.items():
        print(f"  {label}: {text}")
    rows = list(inspection.tensors(reader))
    lines = [("layer", "name", "shape", "dtype", "ranks")]
    lines += [(f"{r.layer:02d}", r.name, str(list(r.shape)), r.dtype, ",".join(map(str, r.ranks))) for r in rows]
    print_table(lines)
    elements = sum(_elements(row) * len(row.ranks) for row in rows)
    print(f"{len(rows)} rows, {elements:,} elements in {reader.model_parallel_size} tensor-parallel rank(s)")


def show_file(path: str) -> None:
    """Print a .pt file's entries."""
    contents = load_file(path, mmap=True)
    entries = contents if isinstance(contents, dict) else {"contents": contents}
    print_table([(str(name), inspection.described(value)[:200]) for name, value in entries.items()])


def show_attributes(path: str, queries: List[str]) -> None:
    """Print the values at `a/b/c` in each .pt file that has them. Raises CheckpointError for one that none has."""
    files = [path] if os.path.isfile(path) else _files(checkpoint_folder(path))
    missing = dict.fromkeys(queries)
    for file in files:
        contents = load_file(file, mmap=True)
        for query in queries:
            try:
                value = inspection.attribute(file, contents, query)
            except KeyError:
                continue
            missing.pop(query, None)
            print(f"{os.path.basename(file)} {query}: {inspection.described(value)}")
    if missing:
        raise CheckpointError(f"no file of {path} has {', '.join(missing)}")


def compare(first: str, second: str, only_differences: bool = False) -> bool:
    """Print two checkpoints place by place; returns whether anything differs."""
    readers = [CheckpointReader(checkpoint_folder(path)) for path in (first, second)]
    for place, reader in zip(("first", "second"), readers, strict=True):
        saved = ", ".join(f"{label} {text}" for label, text in inspection.summary(reader).items())
        print(f"{place}: {reader.folder} ({saved})")
    lines, different, values = [("place", "first", "second", "largest difference")], 0, []
    for each in inspection.differences(*readers):
        different += each.differs
        values += [each.largest] if each.largest is not None else []
        if each.differs or not only_differences:
            second_text = "same" if each.first == each.second else each.second
            lines.append((each.where, each.first, second_text, "" if each.largest is None else f"{each.largest:.6g}"))
    if len(lines) > 1:
        print_table(lines)
    largest = f"; largest difference of values {max(values):.6g}" if values else ""
    print(f"differences: {different}{largest}" if different else f"no differences in {len(values)} tensors")
    return different > 0


def print_table(lines: List[tuple]) -> None:
    """Columns as wide as their longest entry."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    for line in lines:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]]).rstrip())


def _elements(row: Any) -> int:
    count = 1
    for size in row.shape:
        count *= size
    return count


def _files(folder: str) -> List[str]:
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".pt")]


def main(input_args: Optional[List[str]] = None) -> None:
    """The command line. Exits with 1 if two checkpoints differ."""
    parser = argparse.ArgumentParser(description="Show a checkpoint, or in what two checkpoints differ.")
    parser.add_argument("dir", help="a global_step<N> folder, the folder these are in, or one .pt file; A,B is A B")
    parser.add_argument("dir2", nargs="?", help="a second checkpoint to compare with")
    parser.add_argument("-a", "--attributes", nargs="+", help="print these entries of the .pt files, such as args/x")
    parser.add_argument("-c", "--compare", action="store_true", help="two checkpoints are given (they always compare)")
    parser.add_argument("-d", "--diff", action="store_true", help="print only what differs")
    given = parser.parse_args(input_args)
    describe_process(0, 1)  # this is not a rank of the job in which it may have been started
    paths = [given.dir, given.dir2] if given.dir2 else [given.dir]
    if len(paths) == 1 and "," in given.dir and not os.path.exists(given.dir):
        paths = given.dir.split(",", 1)
    if (given.compare or given.diff) and len(paths) == 1:
        parser.error("--compare and --diff need two checkpoints")
    if given.attributes:
        for path in paths:
            show_attributes(path, given.attributes)
    elif len(paths) == 1:
        show(paths[0])
    elif compare(*paths, only_differences=given.diff):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
