"""Changes of the patch made in a text."""

from tools.neox_patch.source import Source


def patched(changes, text):
    """The text with all of the changes, each of which then finds nothing more to do, the others made or not."""
    for change in changes:
        text = edited(change, text)
        assert edited(change, text) == text, f"{change.summary}: made twice"
    for change in changes:
        assert edited(change, text) == text, f"{change.summary}: made again after the others"
    return text


def edited(change, text):
    """The text with one change."""
    source = Source(change.path, text)
    change.edit(source)
    return source.result() if source.changed else text
