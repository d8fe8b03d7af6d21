"""GPT-2's byte-pair encoding, from its two published files: gpt2_bpe/encoder.json and
gpt2_bpe/vocab.bpe."""

from typing import Any

from gradleak.core.errors import GradleakError
from gradleak.core.local_data import local_file

VOCABULARY, MERGES = "gpt2_bpe/encoder.json", "gpt2_bpe/vocab.bpe"
END_OF_TEXT = "<|endoftext|>"
WORDS = 50_257


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
