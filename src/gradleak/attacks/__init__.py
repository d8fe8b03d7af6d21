"""Attacks: one file and one line here add one."""

from gradleak.attacks import blind  # noqa: F401
from gradleak.attacks.recipes import bert_large, dlg, lamp, tag  # noqa: F401
