"""Files that are not ours to ship, found in the folder that the environment variable
GRADLEAK_DATA names."""

import os
from pathlib import Path

from gradleak.core.errors import GradleakError

FOLDER_VARIABLE = "GRADLEAK_DATA"


def local_file(name: str) -> Path:
    """The file of that name (`wikitext2/test.txt.xz`) in the data folder; says what to do where
    there is none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise GradleakError(
            f"The environment variable {FOLDER_VARIABLE} is not set; set it to the folder that"
            f" holds {name}."
        )
    path = Path(folder).expanduser() / name
    if not path.is_file():
        raise GradleakError(
            f"There is no {name} in the folder {FOLDER_VARIABLE} names ({Path(folder)}); put the"
            " file there."
        )
    return path
