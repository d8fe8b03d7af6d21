"""What is not ours to ship: models of the Hugging Face hub, and files in the folder that the
environment variable GRADLEAK_DATA names.

Left to itself the hub's library asks an unreachable hub ten times over, for most of a minute, and
says so each time; here it is said within seconds whether a model can be had.
"""

import io
import os
import pickle
import re
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gradleak.core.errors import GradleakError

PATIENCE = 2.0  # seconds for a connection to one address
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_unreachable: set[str] = set()  # addresses that were tried
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_beside_folders(path: str) -> bool:
    """Whether what looks like a hub id is a path: `models/clf` where there is a folder `models`."""
    return "/" in path and Path(path.split("/")[0]).is_dir()


def find_model(path: str) -> None:
    """Refuses a hub id that neither network nor cache holds. Where only the cache can be had the
    library is told so."""
    if not HUB_ID.fullmatch(path):
        return  # whoever loads it says what is wrong with it
    stay_offline_unless_reachable()
    if is_offline() and not is_cached(path):
        reason = (
            f"{_endpoint()} cannot be reached"
            if _endpoint() in _unreachable
            else f"{' or '.join(OFFLINE)} is set"
        )
        raise GradleakError(
            f"{path} is no folder here, and as a hub id it is not in the cache ({cache_folder()})"
            f" while {reason}. Check the spelling, connect to the network, or name a folder that"
            " save_pretrained wrote."
        )


def stay_offline_unless_reachable() -> None:
    """Tells the libraries to use the cache alone where the hub cannot be reached."""
    if is_offline() or is_reachable(_endpoint()):
        return
    _unreachable.add(_endpoint())
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Imported before: it has read the environment already
    if constants := sys.modules.get("huggingface_hub.constants"):
        vars(constants)["HF_HUB_OFFLINE"] = True


def is_offline() -> bool:
    """Whether the libraries are told to use the cache alone."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE)


def is_cached(model: str) -> bool:
    """Whether some version of a model lies in the cache."""
    return any(
        (cache_folder() / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")
    )


def cache_folder() -> Path:
    """Where the hub's library keeps what it has downloaded."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


@cache
def is_reachable(address: str) -> bool:
    """Whether the server of an address, or the proxy that stands before it, takes a connection
    within four seconds."""
    asked = urlsplit(address)
    proxy = None if proxy_bypass(asked.hostname or "") else getproxies().get(asked.scheme)
    if proxy and "://" not in proxy:  # as HTTPS_PROXY often is, and libraries read it
        proxy = f"http://{proxy}"
    server = urlsplit(proxy or address)
    place = (server.hostname or "", server.port or (80 if server.scheme == "http" else 443))
    answered: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=PATIENCE).close()
        except OSError:
            return
        answered.append(True)

    # In a thread, since looking up a name has no limit of its own
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)  # a server may have two addresses, the first of which leads nowhere
    return bool(answered)


def quiet_transformers() -> Any:
    """Returns the library, without its warnings and progress bars."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


FOLDER_VARIABLE = "GRADLEAK_DATA"
# GPT-2's vocabulary
VOCABULARY, MERGES = "gpt2_bpe/encoder.json", "gpt2_bpe/vocab.bpe"
END_OF_TEXT = "<|endoftext|>"
WORDS = 50_257


def data_folder(wanted: str, otherwise: str = "") -> Path:
    """Returns the data folder; an error says what should lie in it, and what else helps."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise GradleakError(
            f"The environment variable {FOLDER_VARIABLE} is not set; set {FOLDER_VARIABLE} to the"
            f" folder that holds {wanted}{otherwise}."
        )
    return Path(folder).expanduser()


def local_file(name: str, otherwise: str = "") -> Path:
    """Returns the file of that name (`wikitext2/test.txt.xz`) in the data folder, or the same file
    packed by gzip."""
    path = data_folder(name, otherwise) / name
    packed = path.with_name(f"{path.name}.gz")
    found = next((one for one in (path, packed) if one.is_file()), None)
    if found is None:
        raise GradleakError(
            f"There is no {name} in the folder {FOLDER_VARIABLE} names"
            f" ({path.parents[name.count('/')]}); put the file there."
        )
    return found


class ArraysOnly(pickle.Unpickler):
    """Reads pickled numpy arrays and plain values; anything that could run code is refused."""

    def __init__(self, content: bytes, encoding: str = "ASCII") -> None:
        super().__init__(io.BytesIO(content), encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        known = {
            **dict.fromkeys(
                ["numpy.core.multiarray", "numpy._core.multiarray"], ("_reconstruct", "scalar")
            ),
            "numpy": ("ndarray", "dtype"),
            "_codecs": ("encode",),
        }
        if name not in known.get(module, ()):
            raise GradleakError(
                f"A pickled file asks for {module}.{name}, which is no array: it is not read."
            )
        return super().find_class(module, name)


def byte_pairs() -> Any:
    """A `tokenizers.Tokenizer`: bytes to pairs, nothing put before or after a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    files = [str(local_file(name)) for name in (VOCABULARY, MERGES)]
    try:
        tokenizer = Tokenizer(models.BPE.from_file(*files))
    except Exception as error:  # the library raises plain Exception
        raise GradleakError(
            f"{' and '.join(files)} cannot be read as GPT-2's vocabulary: {error}."
        ) from error
    if tokenizer.get_vocab_size() != WORDS:
        raise GradleakError(
            f"{files[0]} holds {tokenizer.get_vocab_size()} words, GPT-2's {WORDS}: it is another"
            " vocabulary."
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_pair_tokenizer() -> Any:
    """The same as a Hugging Face tokenizer, as targets hold one."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(),
        # Spaces stay as they are in any case; unless told so, the library warns of it
        clean_up_tokenization_spaces=False,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
    )
