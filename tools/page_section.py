"""The part of a page that a command writes, between two marker lines; the rest of the page is written by hand."""

from pathlib import Path
from typing import NamedTuple, Tuple


class PageSection(NamedTuple):
    """path: the page. start, end: its marker lines."""

    path: Path
    start: str
    end: str

    def written(self) -> str:
        """What stands between the markers now. Raises ValueError without markers."""
        return self._parts()[1].strip() + "\n"

    def write(self, new: str) -> None:
        """Put `new` between the markers. Raises ValueError without markers."""
        before, _, after = self._parts()
        self.path.write_text(f"{before}{self.start}\n{new.strip()}\n{self.end}{after}", encoding="utf-8")

    def _parts(self) -> Tuple[str, str, str]:
        """The page before, between and after its markers."""
        before, start, rest = self.path.read_text(encoding="utf-8").partition(self.start)
        inside, end, after = rest.partition(self.end)
        if not (start and end):
            raise ValueError(f"{self.path.name} has not both lines {self.start} and {self.end}")
        return before, inside, after
