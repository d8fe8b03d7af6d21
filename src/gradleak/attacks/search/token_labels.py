"""Labels of a candidate text for a language model: its tokens, which a candidate made of embeddings has only softly."""

import torch
from jaxtyping import Float
from torch import Tensor

from gradleak.core.target import Target

# Ours: no paper says how embeddings are to be read as labels. At a word's own embedding, others at a cosine of 0.3 (GPT-2's mean
# is near that), the word has 0.96 of the weight among GPT-2's 50,257; a smaller number leaves no slope away from a word.
TEMPERATURE = 0.05


def soft_tokens(target: Target, embeddings: Float[Tensor, "*lead tokens hidden"]) -> Float[Tensor, "*lead tokens words"]:
    """How much each embedding points along each word, as probabilities; differentiable in the embeddings.

    A label so moves with the embedding of the position it is the label of: guess and prediction are one text.
    """
    directions = torch.nn.functional.normalize(target.vocabulary.embeddings, dim=-1)
    cosines = torch.nn.functional.normalize(embeddings, dim=-1) @ directions.T
    return (cosines / TEMPERATURE).softmax(-1)
