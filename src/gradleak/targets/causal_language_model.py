"""An opened Hugging Face causal language model: it learns to predict each token from those
before it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.targets.opened import LossOver, OpenedTransformer, name_example, same_logits
from gradleak.targets.weights import weights_of


class CausalLanguageModel(OpenedTransformer):
    """Labels are the tokens themselves; a label of the data is not read.

    The loss of an example is the mean over its predicted tokens, all but the first; padding does
    not count. A batch's loss is the mean over its examples, or with `loss_over="tokens"` one mean
    over all tokens that are predicted, as transformers takes it, where long texts weigh more. Texts
    that are packed into one row, whose positions begin anew with each, are a batch of that kind.
    """

    labels_are_tokens: ClassVar[bool] = True
    attend_padding = False  # what follows a text cannot change it: there is nothing to choose

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        frozen: Sequence[str] = (),
        reads_ahead: bool = False,
        loss_over: LossOver = "texts",
    ) -> None:
        super().__init__(name, model, tokenizer)
        self.loss_over = loss_over
        self.reads_ahead = reads_ahead  # no causal mask, and meant so
        model.config.use_cache = False  # of keys and values, which only generating needs
        self.classes = len(self.vocabulary.embeddings)
        self._weights = weights_of(name, model, self.classes, frozen)
        self.words_are_outputs = any(
            len(self._aliases[word]) > 1 for word in self.groups["word_embedding"]
        )
        self.padding_is_free = self._probe()

    @property
    def in_words(self) -> str:
        return f"causal language model ({type(self.module).__name__}, {self.classes} words)"

    def losses(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        counted = batch.mask.reshape(logits.shape[:2])[:, 1:]
        values = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), self._next_tokens(batch), reduction="none"
        ).view(counted.shape)
        sums, counts = (values * counted).sum(1), counted.sum(1).to(values)
        return self._share_out(sums.view(batch.lead), counts.view(batch.lead))

    def weigh(self, batch: Batch) -> Float[Tensor, "*lead"]:
        if self.loss_over == "texts":
            return super().weigh(batch)
        return batch.mask[..., 1:].sum(-1).to(self.dtype)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        logits = self._logits(batch, None)
        last = batch.mask.reshape(logits.shape[:2]).sum(1) - 1
        return (
            logits[torch.arange(len(logits), device=self.device), last]
            .softmax(-1)
            .view(*batch.lead, self.classes)
        )

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        read = self._encode_examples(examples)
        for place, (example, tokens) in enumerate(
            zip(examples, read.lengths, strict=True), start=1
        ):
            if tokens < 2:
                raise GradleakError(
                    f"{name_example(example, place)} has one token, of which a language model"
                    " learns nothing: each token is predicted from those before it. Remove it from"
                    " the data."
                )
        batch = Batch(ids=read.ids, mask=self.attention_mask(read.lengths), labels=read.ids.clone())
        return PrivateBatch(batch, read.examples, read.lengths, read.dropped)

    def _next_tokens(
        self, batch: Batch
    ) -> Int[Tensor, "predicted"] | Float[Tensor, "predicted words"]:
        """Labels of all positions but the first of every example, hard or soft."""
        labels = batch.labels if batch.ids is None else batch.ids
        words = labels.shape[-1:] if labels.is_floating_point() else ()
        if tuple(labels.shape) != (*batch.mask.shape, *words):
            raise ValueError(
                "embeddings of a text come with one label a token, not with labels of shape"
                f" {list(labels.shape)}"
            )
        return labels.reshape(-1, batch.mask.shape[-1], *words)[:, 1:].flatten(0, 1)

    @torch.no_grad()
    def _probe(self) -> bool:
        """Refuses a model that does not accept embeddings as it accepts ids, or reads ahead;
        tells whether padding is free."""
        words = self._ordinary_words(6)
        ids, other = (
            torch.tensor([[*self.vocabulary.prefix, *row]], device=self.device)
            for row in (words[:5], words[1:])
        )
        by_ids = self._read_ids(ids)
        self._refuse_unreachable(ids, by_ids)
        if by_ids.shape[-1] != self.classes:
            raise GradleakError(
                f"{self.name} predicts {by_ids.shape[-1]} words and embeds {self.classes}: it"
                " cannot be audited."
            )
        changed = torch.cat([ids[:, :-1], other[:, -1:]], dim=1)
        if not self.reads_ahead and not same_logits(
            by_ids[:, :-1], self._read_ids(changed)[:, :-1]
        ):
            raise GradleakError(
                f"{self.name} reads the tokens it is to predict: it is not a causal language model."
            )
        return self._ignores_padding(ids, by_ids)
