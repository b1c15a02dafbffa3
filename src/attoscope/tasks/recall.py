"""Out-of-context recall: which facts that were never shown does the smallest weight infer?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from attoscope.svm.selection import Selection
from attoscope.tasks.instances import check_sizes


@dataclass(frozen=True, eq=False)
class OCRTask:
    """Subjects of n classes, and two relations; a class shares one fact b and one consequence c.

    The logit of an answer for (subject s, relation r) is `W[:, s] + W[:, r]`: W has a row per
    answer (b of each class, then c of each class) and a column per subject and relation.
    Shown: the fact of every subject, and the consequence of the training subjects. Asked: the
    consequence of the test subjects, which follows if "fact b entails consequence c" was inferred.

    Fields: `queries` (row, subject + relation) one-hot sums and `answers` (row,) of what is
    shown; `test_queries`, `test_answers` of what is asked; `classes`.
    """

    queries: Float[np.ndarray, "row column"]
    answers: Int[np.ndarray, " row"]
    test_queries: Float[np.ndarray, "test column"]
    test_answers: Int[np.ndarray, " test"]
    classes: int

    @property
    def selection(self) -> Selection:
        """What is shown as a selection: the right answer over all 2n - 1 others."""
        return Selection(np.eye(2 * self.classes)[None], self.queries, self.answers)

    @property
    def test_selection(self) -> Selection:
        """What is asked as a selection, to read margins from."""
        return Selection(np.eye(2 * self.classes)[None], self.test_queries, self.test_answers)

    def test_margin(self, weight: Float[np.ndarray, "answer column"]) -> float:
        """The least margin of a right answer that was never shown; positive: all inferred."""
        asked = self.test_selection
        return float(asked.margins(weight)[~asked.selected].min())


def out_of_context(n: int, m_train: int, m_test: int) -> OCRTask:
    """n classes with m_train training and m_test test subjects each.

    Subjects are in order of class, its training subjects first; the last two columns are the
    relations. Least test margin: 0 for the smallest Frobenius norm; for the nuclear norm at least
    m_train / (m_train + m_test). Source: arXiv 2506.10887.
    """
    check_sizes(n=n, m_train=m_train, m_test=m_test)
    each = m_train + m_test
    subject = np.arange(n * each)
    kind, trains = subject // each, subject % each < m_train
    columns = np.eye(len(subject) + 2)
    fact = columns[: len(subject)] + columns[-2]
    consequence = columns[: len(subject)] + columns[-1]
    return OCRTask(
        queries=np.concatenate([fact, consequence[trains]]),
        answers=np.concatenate([kind, n + kind[trains]]),
        test_queries=consequence[~trains],
        test_answers=n + kind[~trains],
        classes=n,
    )
