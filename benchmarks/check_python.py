"""Says, before anything is installed, which Python is needed; with --torch, whether its build fits
this machine.

Runs on any Python, also one too old for the package: python benchmarks/check_python.py.
"""

import os
import sys

OLDEST, NEWEST = (3, 11), (3, 12)  # as in pyproject.toml


def complain(version):
    """The sentence for a Python that is not supported, or none."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return ""
    return (
        "gradleak needs Python 3.11 or 3.12, and this is {}.{}. Install one of them and name it,"
        " say: make audit PYTHON=python3.12 (after make clean, if .venv was made with another)."
    ).format(*version[:2])


def warn_of_cuda(cuda, has_gpu):
    """The sentence for a build of torch that does more than this machine can, or none."""
    if not cuda or has_gpu:
        return ""
    return (
        f"Note: torch's build for CUDA {cuda} was installed, and no GPU is seen here. It works, but"
        " is gigabytes larger than the build for CPUs: make clean, and again with TORCH_INDEX set"
        " to an index of CPU builds."
    )


def main():
    if "--torch" in sys.argv:
        import torch

        said = warn_of_cuda(
            torch.version.cuda, torch.cuda.is_available() or os.path.exists("/dev/nvidiactl")
        )
        print(said) if said else None
        return 0
    said = complain(sys.version_info)
    print(said) if said else None
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
