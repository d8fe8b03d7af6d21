"""Words of a report that a reader may not know, each in a sentence or two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from markupsafe import Markup

from gradleak.records.flags import FLAGS
from gradleak.records.judgement import OF_PICTURES, RULES
from gradleak.report.page.opening import Opening
from gradleak.report.page.section import JudgedRun, Report, Section
from gradleak.report.page.setting_list import SettingList

WORDS = {
    "update": (
        "What a client sends instead of its data: how its examples would change the model. "
        "This is what is attacked."
    ),
    "blind guess": (
        "A guess with the same knowledge, without the update. What an attack gets "
        "beyond it, the update gave away."
    ),
    "gain": "How much more was rebuilt than by a blind guess.",
    "worst case": (
        "For every example the attack that got most out of it. A defense has to "
        "withstand that. Over several attacks it stands beside the best of as many blind guesses."
    ),
    "interval": (
        "Where the true mean lies with 95 % confidence, by how client batches differ. "
        "Few batches make it wide."
    ),
    "setting": (
        "One kind of client: its model, data, protocol and defenses. All attacks on it "
        "count together."
    ),
    "word for word": "The guess has the very words of the private text, in their order.",
    "proven": (
        "The guess gives back the whole update, up to rounding, and nothing near it does: "
        "the attacker knows it is right."
    ),
    **{word: f"{rule[0].upper()}{rule[1:]}." for word, rule in RULES.items()},
    "flag": "A reason to doubt a number, raised by a rule and not by opinion.",
    "client batch": (
        "The examples of one client that went into one update. Intervals treat each "
        "batch as one draw."
    ),
}
METRICS = {
    "rouge1": "The share of words that guess and private text have in common, in any order.",
    "rouge2": "The share of neighbouring pairs of words that both have.",
    "rougeL": "The longest run of words in the same order, as a share.",
    "exact_match": "Whether the guess is the private text word for word.",
    "token_accuracy": "The share of places at which the guess has the right piece of a word.",
    "bag_f1": "The share of pieces of words that both have, in any order.",
    "secret_recall": "The share of marked secrets (a PIN, a name) that the guess holds whole.",
    "secret_edit_distance": (
        "The share of letters to change to get from the guess to a marked secret: less leaks more."
    ),
    "semantic_similarity": "How alike the meanings of guess and text are, by a sentence encoder.",
    "mse": "The mean squared difference of pixels: less is more leak.",
    "psnr": "The same on a scale of decibels: more is more leak.",
    "ssim": "How alike local patterns of light and dark are: 1 is the same picture.",
    "lpips": (
        "How different two pictures look to a network trained on what people see: less is "
        "more leak."
    ),
}


@dataclass(frozen=True)
class Glossary(Section):
    """The words that this report uses, in the order of the alphabet; on the page alone."""

    name = "glossary"
    title = heading = "Words"
    template = """
<dl class="facts">
  {%- for word, meaning in glossary.meanings.items() -%}
  <dt id="{{ glossary.address(word) }}">{{ word }}</dt><dd>{{ meaning }}</dd>
  {%- endfor -%}
</dl>
"""

    @classmethod
    def gather(cls, run: JudgedRun) -> Self:
        return cls()

    def prepare(self, report: Report) -> Mapping[str, Any]:
        return {"glossary": WordLinks(explain_words(report))}


@dataclass(frozen=True)
class WordLinks:
    """Links from words of a page to what they mean."""

    meanings: Mapping[str, str]

    def address(self, word: str) -> str:
        """Returns the place of a word in the glossary."""
        return f"word-{word.replace(' ', '-')}"

    def link(self, word: str, shown: str | None = None) -> Markup:
        """Links a word of the glossary, written otherwise where asked."""
        link = Markup('<a class="term" href="#{}" title="{}">{}</a>')
        return link.format(self.address(word), self.meanings.get(word, ""), shown or word)

    def link_if_known(self, word: str) -> Markup | str:
        """Links a word where the glossary has it, and leaves others as they are."""
        return self.link(word) if word in self.meanings else word


def explain_words(report: Report) -> dict[str, str]:
    """Explains the words that this report uses, in the order of the alphabet."""
    verdict = report.find(Opening).verdict
    scored = {one.metric for one in verdict.scores}
    measured = scored | {*report.find(SettingList).metrics, report.metric}
    raised = {flag.name for flag in verdict.flags}
    metrics = {name: meaning for name, meaning in METRICS.items() if name in measured}
    flags = {
        name: f"{flag.meaning} {flag.what_to_do}" for name, flag in FLAGS.items() if name in raised
    }
    found = WORDS | metrics | flags
    if report.metric in OF_PICTURES:
        found.pop("word for word")
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))
