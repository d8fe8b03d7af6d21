"""Files that are not ours to ship, found in the folder that the environment variable GRADLEAK_DATA
names; the pickled arrays that some are, and GPT-2's byte-pair encoding, which is two of them."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

from gradleak.core.errors import GradleakError

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

    special = dict.fromkeys(("eos_token", "bos_token", "unk_token"), END_OF_TEXT)
    # Spaces stay as they are in any case; unless told so, the library warns of it.
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(), clean_up_tokenization_spaces=False, **special
    )
