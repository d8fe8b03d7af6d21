"""Attacks: one file and one line here add one."""

from gradleak.attacks import bag_of_words, blind, portfolio, span, span_continuous
from gradleak.attacks.energy import energy_attack
from gradleak.attacks.gradient_matching import picture_search
from gradleak.attacks.learning_to_invert import picture_attacks, text_attacks
from gradleak.attacks.recipes import baselines, lamp
from gradleak.attacks.rows import rows_attack
