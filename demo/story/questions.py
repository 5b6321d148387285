"""The questions that the demo asks of its default document."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
# What the model is told to be asked about when it does not see the document.
DEFAULT_TITLE = "the GNU General Public License, version 3"


@dataclass
class Question:
    text: str
    expected: str | None = None  # a regular expression that a right answer contains; None: not judged
    whole: bool = False  # the answer is the expression and nothing else
    begun: str = ""  # the answer's first words, which the model goes on with

    def right(self, answer: str) -> bool | None:
        if self.expected is None:
            return None
        if self.whole:
            return re.fullmatch(self.expected, answer) is not None
        return re.search(self.expected, answer, re.IGNORECASE) is not None


# Whether the model knows an answer without the document is found out when the demo runs: such
# questions do not count. Answers are begun, because a model as small as the default one talks about
# the text instead of answering from it where it may begin as it likes.
GPL_3 = [
    Question("What may you consider more useful if your program is a subroutine library?", "permit linking",
             begun="You may consider it more useful to"),
    Question("What would you use for a GUI interface?", "about box", begun="For a GUI interface, you would use"),
    Question("Who should sign a copyright disclaimer for the program?", "school", begun="You should get your employer"),
    Question("Which law shall reviewing courts apply?", "absolute waiver",
             begun="Reviewing courts shall apply local law that most closely approximates"),
    Question("Before which date must a discriminatory patent license have been granted to be allowed?",
             "28 March 2007", begun="It must have been granted prior to"),
    Question("Which treaty does the section about anti-circumvention law name?", "WIPO",
             begun="It names article 11 of the"),
    Question('What is a "consumer product"?', "personal, family",
             begun='A "consumer product" means any tangible personal property which is normally used for'),
    Question('What does it mean to "convey" a work?', "propagation", begun='To "convey" a work means any kind of'),
    Question("What should the program print that starts in an interactive mode?", "ABSOLUTELY NO WARRANTY",
             begun="It should print that the program comes with"),
]
