"""Stop with a plain sentence when this Python cannot run the project. Must itself run on any Python 3."""

import sys

NEEDED = (3, 10)


def missing():
    """What is missing, as a list of sentences."""
    found = ".".join(str(number) for number in sys.version_info[:3])
    if sys.version_info < NEEDED:
        return [
            "Python %d.%d or newer is needed, and %s is Python %s. Name a newer one: make demo PYTHON=python3.11"
            % (NEEDED[0], NEEDED[1], sys.executable, found)
        ]
    sentences = []
    for module, package in (("venv", "python3-venv"), ("ensurepip", "python3-venv")):
        try:
            __import__(module)
        except ImportError:
            sentences.append(
                "%s has no module '%s'; install it (Debian, Ubuntu: %s)" % (sys.executable, module, package)
            )
    return sentences


if __name__ == "__main__":
    problems = missing()
    for problem in problems:
        sys.stderr.write("error: %s\n" % problem)
    sys.exit(1 if problems else 0)
