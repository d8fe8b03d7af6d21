"""A causal language model as a prior, over the target's own vocabulary or through a tokenizer of
its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import pad_rows
from gradleak.core.errors import GradleakError
from gradleak.core.not_ours import find_model, quiet_transformers
from gradleak.core.prior import Prior, PriorSpec, pick
from gradleak.core.registry import register
from gradleak.core.streams import Streams
from gradleak.core.target import Target

# Of sentences scored in one pass: the logits are the large part
TOKENS_AT_ONCE = {"cuda": 60_000, "cpu": 8_000}
BEAMS = 20  # kept in the search of a blind guess
SAMPLES = 20  # texts drawn for a blind guess in another vocabulary, of which the likeliest counts
TYPICAL_WORDS = 10
PROBE = "The quick brown fox, 1234 unbelievable words & more!"  # which vocabularies cut differently


@register("prior", "causal_lm")
@dataclass(frozen=True)
class CausalLMPrior(PriorSpec):
    """A causal language model by hub id, folder or .gguf file; text is re-tokenised where the
    target's vocabulary differs."""

    path: str
    allow_pickle: bool = False  # load .bin weights, which can run code

    def open(self, target: Target) -> Prior:
        file = Path(self.path)
        if not file.exists():
            find_model(self.path)
        transformers = quiet_transformers()
        packed = file.suffix == ".gguf"
        source = str(file.parent) if packed else self.path
        options: dict[str, Any] = {"gguf_file": file.name} if packed else {}
        options["trust_remote_code"] = False
        weights = {} if packed or self.allow_pickle else {"use_safetensors": True}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source, **options, **weights
            ).float()
        except (OSError, ValueError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise GradleakError(
                f"The prior {self.path} could not be loaded as a causal language model: {first}"
            ) from error
        if shares_vocabulary(tokenizer, target):
            return SameVocabulary(model, target)
        return OwnVocabulary(model, tokenizer, target)


def shares_vocabulary(tokenizer: Any, target: Target) -> bool:
    """Whether a tokenizer gives the target's own ids: same size, and the same ids and frame for
    a probe text."""
    same_ids = list(tokenizer(PROBE)["input_ids"]) == target.encode([PROBE])[0]
    return same_ids and len(tokenizer) == len(target.vocabulary.allowed)


class SameVocabulary(Prior):
    """Scores the target's token ids as they are."""

    def __init__(self, model: Any, target: Target) -> None:
        self.model = model.eval().requires_grad_(False).to(target.device)
        self.vocabulary = target.vocabulary
        self._likely: dict[int, list[int]] = {}

    @torch.no_grad()
    def nll(
        self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        most = max(1, TOKENS_AT_ONCE.get(ids.device.type, 8_000) // ids.shape[1])
        pieces = zip(torch.split(ids, most), torch.split(lengths, most), strict=True)
        return torch.cat([self._nll(some, their) for some, their in pieces])

    def _nll(self, ids: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        counted = torch.arange(1, longest, device=ids.device) < lengths[:, None]
        return (token_nll(self.model, ids[:, :longest]) * counted).sum(1) / (lengths - 1)

    @torch.no_grad()
    def score_words(
        self, sentence: Int[Tensor, "tokens"], place: int, words: Int[Tensor, "words"]
    ) -> Float[Tensor, "words"]:
        """From what stands before the place in one pass, and from what follows in one for each
        word."""
        after = len(sentence) - 1 - place
        scores = self.screen_words(sentence, place, words)
        if after == 0:
            return scores
        following = sentence[place + 1 :].expand(len(words), -1)
        most = max(1, TOKENS_AT_ONCE.get(sentence.device.type, 8_000) // len(sentence))
        found = []
        for some in torch.split(torch.arange(len(words), device=sentence.device), most):
            ids = sentence[:-1].repeat(len(some), 1)
            ids[:, place] = words[some]
            logits = self.model(input_ids=ids, logits_to_keep=after).logits.float()
            losses = F.cross_entropy(
                logits.flatten(0, 1), following[some].flatten(), reduction="none"
            )
            found.append(losses.view(len(some), -1).double().sum(1))
        return scores - torch.cat(found)

    @torch.no_grad()
    def screen_words(
        self, sentence: Int[Tensor, "tokens"], place: int, words: Int[Tensor, "words"]
    ) -> Float[Tensor, "words"]:
        """How likely each word is after what stands before it, in one pass for all."""
        if place == 0:  # no model predicts the token that begins a text
            return torch.zeros(len(words), dtype=torch.float64, device=sentence.device)
        logits = self.model(input_ids=sentence[None, :place], logits_to_keep=1).logits[0, -1]
        chances: Tensor = logits.double().log_softmax(-1)
        return chances[words]

    def likely(self, length: int, streams: Streams) -> list[int]:
        """The likeliest sentence a beam search finds: it depends on the length alone, so it is
        searched once for each."""
        if length not in self._likely:
            self._likely[length] = self._beam_search(length)
        return list(self._likely[length])

    @torch.no_grad()
    def _beam_search(self, length: int) -> list[int]:
        frame, fixed = self.vocabulary.frame(length)
        device = self.vocabulary.embeddings.device
        # Where no token begins a text (GPT-2), the one that separates texts comes before it, and is
        # taken off again.
        outside = 0 if fixed[0] else 1
        beams = torch.tensor([self.vocabulary.pad] if outside else frame[:1], device=device)[None]
        scores = torch.zeros(1, device=device)
        for place in range(1 - outside, length):
            logits = (
                self.model(input_ids=beams, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
            )
            if fixed[place]:
                logits = logits[:, frame[place] : frame[place] + 1]
            else:
                logits = logits.masked_fill(~self.vocabulary.allowed, -torch.inf)
            scores, chosen = (scores[:, None] + logits).flatten().topk(min(BEAMS, logits.numel()))
            beam, word = chosen // logits.shape[1], chosen % logits.shape[1]
            words = torch.full_like(word, frame[place]) if fixed[place] else word
            beams = torch.cat([beams[beam], words[:, None]], dim=1)
        return [int(number) for number in beams[scores.argmax(), outside:]]

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        """Word by word as the model believes (temperature 1), to the length that was asked."""
        return draw_by_length(lengths, streams, self.vocabulary.embeddings.device, self._sample)

    def _sample(self, length: int, shares: Float[Tensor, "sentences tokens"]) -> list[list[int]]:
        frame, fixed = self.vocabulary.frame(length)
        device = self.vocabulary.embeddings.device
        outside = 0 if fixed[0] else 1  # as in the search above
        first = [self.vocabulary.pad] if outside else frame[:1]
        ids = torch.tensor([first] * len(shares), device=device)
        state = None
        for place in range(1 - outside, length):
            if fixed[place]:
                words = torch.full((len(shares),), frame[place], device=device)
            else:
                logits, state = next_words(self.model, ids, state)
                allowed = logits.masked_fill(~self.vocabulary.allowed, -torch.inf)
                words = pick(allowed.softmax(-1), shares[:, place]).to(device)
            ids = torch.cat([ids, words[:, None]], dim=1)
        return ids[:, outside:].tolist()

    def likely_length(self) -> int:
        return TYPICAL_WORDS + self.vocabulary.frame_length

    @torch.no_grad()
    def next_words(
        self, ids: Int[Tensor, "sentences tokens"]
    ) -> Float[Tensor, "sentences words"] | None:
        logits: Tensor = self.model(input_ids=ids, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1)


class OwnVocabulary(Prior):
    """Decodes the target's tokens and scores the text with the model's own tokenizer, per token
    of that tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, target: Target) -> None:
        self.model = model.eval().requires_grad_(False).to(target.device)
        self.tokenizer, self.target = tokenizer, target
        start = tokenizer.bos_token_id
        self.start = int(tokenizer.eos_token_id if start is None else start)

    @torch.no_grad()
    def nll(
        self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        texts = [
            self.target.decode(row[:length])
            for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)
        ]
        rows = [
            [self.start, *tokens, self.tokenizer.eos_token_id] for tokens in self._encode(texts)
        ]
        most = max(1, TOKENS_AT_ONCE.get(ids.device.type, 8_000) // max(map(len, rows)))
        return torch.cat(
            [self._nll(rows[first : first + most]) for first in range(0, len(rows), most)]
        )

    def score_words(
        self, sentence: Int[Tensor, "tokens"], place: int, words: Int[Tensor, "words"]
    ) -> Float[Tensor, "words"]:
        """By the text that each word makes, in all its tokens of the model's own."""
        ids = sentence.repeat(len(words), 1)
        ids[:, place] = words
        counts = [
            len(row) + 1 for row in self._encode([self.target.decode(row) for row in ids.tolist()])
        ]
        means = self.nll(ids, torch.full_like(words, len(sentence))).double()
        return -means * torch.tensor(counts, device=means.device)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [
            list(tokens) for tokens in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]

    def _nll(self, rows: list[list[int]]) -> Tensor:
        lengths = torch.tensor([len(row) for row in rows], device=self.target.device)
        ids = pad_rows(rows, self.start).to(self.target.device)
        counted = torch.arange(1, ids.shape[1], device=ids.device) < lengths[:, None]
        return (token_nll(self.model, ids) * counted).sum(1) / (lengths - 1)

    @torch.no_grad()
    def likely(self, length: int, streams: Streams) -> list[int]:
        """The likeliest of sampled texts, cut or padded with its own beginning to the target's
        number of tokens."""
        generator = streams.generator()
        ids = torch.full((SAMPLES, 1), self.start, device=self.target.device)
        for _ in range(length):
            logits = self.model(input_ids=ids).logits[:, -1]
            logits[:, self.tokenizer.all_special_ids] = -torch.inf
            ids = torch.cat(
                [
                    ids,
                    torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(
                        ids.device
                    ),
                ],
                dim=1,
            )
        best = self._nll([row.tolist() for row in ids])
        return self._fit(self.tokenizer.decode(ids[int(best.argmin()), 1:]), length)

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        """One sampled text each (temperature 1), cut or padded as the likely one is."""
        return draw_by_length(lengths, streams, self.target.device, self._sample)

    def _sample(self, length: int, shares: Float[Tensor, "sentences tokens"]) -> list[list[int]]:
        ids = torch.full((len(shares), 1), self.start, device=self.target.device)
        state = None
        for place in range(length):
            logits, state = next_words(self.model, ids, state)
            logits[:, self.tokenizer.all_special_ids] = -torch.inf
            words = pick(logits.softmax(-1), shares[:, place]).to(ids.device)
            ids = torch.cat([ids, words[:, None]], dim=1)
        return [self._fit(self.tokenizer.decode(row[1:]), length) for row in ids]

    def _fit(self, text: str, length: int) -> list[int]:
        """A text as so many of the target's tokens: cut, or padded with its own beginning."""
        vocabulary = self.target.vocabulary
        ids = self.target.encode([text])[0]
        return vocabulary.fill(length, [number for number in ids if vocabulary.allowed[number]])

    def likely_length(self) -> int:
        return TYPICAL_WORDS + self.target.vocabulary.frame_length


@torch.no_grad()
def draw_by_length(
    lengths: Sequence[int],
    streams: Sequence[Streams],
    device: torch.device,
    sample: Callable[[int, Float[Tensor, "sentences tokens"]], list[list[int]]],
) -> list[list[int]]:
    """Samples sentences of one length together, as many as a pass takes, each by its own stream."""
    drawn: list[list[int]] = [[] for _ in lengths]
    for length in dict.fromkeys(lengths):
        places = [place for place, one in enumerate(lengths) if one == length]
        most = max(1, TOKENS_AT_ONCE.get(device.type, 8_000) // length)
        for group in (places[first : first + most] for first in range(0, len(places), most)):
            generators = [streams[place].generator() for place in group]
            shares = torch.stack([torch.rand(length, generator=one) for one in generators])
            for place, sentence in zip(group, sample(length, shares), strict=True):
                drawn[place] = sentence
    return drawn


def next_words(
    model: Any,
    ids: Int[Tensor, "sentences tokens"],
    state: Any,
) -> tuple[Float[Tensor, "sentences words"], Any]:
    """Logits of the word that comes next, and what the model keeps of the text so far.

    With that state only the last token is read. Models that keep none read the whole text again.
    """
    if state is None:
        output = model(input_ids=ids, use_cache=True)
    else:
        output = model(input_ids=ids[:, -1:], past_key_values=state, use_cache=True)
    return output.logits[:, -1].float(), output.get("past_key_values")


def token_nll(
    model: Any, ids: Int[Tensor, "sentences tokens"]
) -> Float[Tensor, "sentences predicted"]:
    """The negative log-likelihood of every token after the first."""
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    ).view(len(ids), -1)
