"""Attacks: one file and one line here add one."""

from gradleak.attacks import bag_of_words, blind, portfolio, span, span_continuous  # noqa: F401
from gradleak.attacks.energy import attack as energy_attack  # noqa: F401
from gradleak.attacks.learning_to_invert import picture_attacks, text_attacks  # noqa: F401
from gradleak.attacks.recipes import bert_large, dlg, gi_gip, ig, lamp, partial_gradients, tag  # noqa: F401
