"""Eight English paragraphs of ours, read when no text is given. Different subjects on purpose."""

from __future__ import annotations

from attoscope.errors import AttoscopeError
from attoscope.trace import Counts, Subject

SAMPLE_TEXTS = (
    "The lighthouse keeper wound the clock every evening at six. When the fog came in, "
    "the keeper lit the lamp early and wrote the hour in a book, because the harbour "
    "master asked for the book at the end of every month and paid by the hour. In forty "
    "years the keeper never missed an evening, and the book was never wrong by more than "
    "a minute.",
    "Bread needs four things: flour, water, salt and time. Time is the one that people "
    "leave out. A dough that rests overnight in a cold place tastes of something, and a "
    "dough that is hurried tastes of yeast. If the kitchen is warm, use less yeast; if it "
    "is cold, use more time.",
    "The committee met on Tuesday to decide about the bridge. Engineers had found cracks "
    "in two of the eleven piers, and the cheaper repair would close the road for a "
    "season. The mayor said that the town could not wait a season. The engineers said "
    "that the piers could not wait a year. In the end the committee voted seven to four "
    "for the cheaper repair.",
    "Crows remember faces. In one experiment the people who trapped the birds wore a "
    "mask, and years later crows that had never been trapped still scolded anyone who "
    "wore it. The young had learned from the old which face to fear, though the face had "
    "done nothing to them.",
    "To sort a list, split it in two, sort each half, and merge the halves. Merging is "
    "easy: look at the first item of each half, take the smaller, and repeat until one "
    "half is empty. Each level of splitting costs one pass over the items, and there are "
    "as many levels as times that the length can be halved.",
    "My grandmother kept her letters in a tin that had once held biscuits. She read them "
    "on Sundays, always in the same order, and when she came to the one from her brother "
    "she put it back without opening it. I asked her once what it said. She told me that "
    "she knew what it said, and that was why.",
    "The second half began badly for the visitors. Their captain was sent off after nine "
    "minutes, and from the free kick the home side scored. Yet with ten men the visitors "
    "pressed harder than they had with eleven, and in the last minute the captain's "
    "younger brother, on as a substitute, headed the ball in off the post.",
    "Water expands when it freezes, which is unusual. Most liquids shrink as they cool "
    "and go on shrinking as they turn solid. Because ice is lighter than water it floats, "
    "lakes freeze from the top, and fish live through the winter under the ice in water "
    "that is a little warmer than the air.",
)


def sample_for(subject: Subject, counts: Counts) -> list[str]:
    """The sample, and a note in `counts` that it was read, for a model that reads text."""
    if subject.tokenizer is None:
        raise AttoscopeError(
            f"no data was given and {subject.name} has no tokenizer for the built-in sample; "
            "give texts, images or a ready batch"
        )
    counts.notes.append(
        f"no text was given: read the built-in sample of {len(SAMPLE_TEXTS)} paragraphs"
    )
    return list(SAMPLE_TEXTS)
