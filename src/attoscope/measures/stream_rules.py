"""What the residual stream gives away: rules, with their thresholds and why these.

- *Channel*: above one half, one channel holds more of a token's energy than all others
together;
  working language models have such points, so this is a note. Above four fifths it is more than
  twice as long as all others together, and two tokens with nothing else in common have a cosine
  of 0.8: cosines, norms and quantisation ranges speak of that channel alone. That is a warning.
- *Massive activation*: a thousand times the median, the definition of Sun et al. 2024.
- *Idle*: a block that changes the stream by less than a thousandth moves nothing that half
  precision would keep.
- *Exploding*: a block that adds to the stream as much as its predecessors did makes it grow by
  at most 2, 3/2, 4/3 …, even if all additions are aligned. Doubling three blocks in a row is
  exponential. So is one block that grows the stream 32 times: what came in is then less than a
  thousandth of the energy, and the skip connection is cut. The first block is exempt, since
  embeddings may be of any scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.places import parse
from attoscope.measures.rules import Book, Rule

OUTLIER_SHARE = 0.5
MASSIVE_SHARE = 0.8
MASSIVE = 1000.0
IDLE = 1e-3
DOUBLING = 2.0
IN_A_ROW = 3
CUT = 32.0

Cells = NDArray[np.bool_]


def not_finite(book: Book) -> Cells:
    """Any value that is NaN or infinite."""
    return book.values("non_finite") > 0


def massive_channel(book: Book) -> Cells:
    """One channel is more than twice as long as all others together."""
    return book.values("channel_share") > MASSIVE_SHARE


def outlier_channel(book: Book) -> Cells:
    """One channel holds more of the energy than all others together."""
    return book.values("channel_share") > OUTLIER_SHARE


def massive_activation(book: Book) -> Cells:
    """The largest activation is a thousand times the median one."""
    return book.values("massive_activation") > MASSIVE


def idle(book: Book) -> Cells:
    """The block leaves the stream as it was."""
    return book.values("update_ratio") < IDLE


def exploding(book: Book) -> Cells:
    """The stream doubles block after block, or one block drowns what came in."""
    reading = book.readings["growth"]
    growth = reading.values
    places = [parse(str(label)) for label in reading.coords["layer"]]
    later = np.array([place.index != "0" for place in places], bool)
    cells = later & (growth > CUT)
    run: list[int] = []
    for i, place in enumerate(places):
        if run and place.track != places[run[-1]].track:
            run = []
        run = [*run, i] if later[i] and growth[i] > DOUBLING else []
        if len(run) >= IN_A_ROW:
            cells[run] = True
    return np.asarray(cells, bool)


_FIND_CHANNEL = """\
channel = $channel
for name, weight in model.named_parameters():
    if weight.dim() == 1 and weight.numel() > channel:
        typical = weight.abs().median().item()
        if weight[channel].abs().item() > 10 * typical:
            print(name, weight[channel].item(), "against a median of", typical)
"""

RULES: tuple[Rule, ...] = (
    Rule(
        id="non_finite",
        title="NaN or infinity in the stream",
        severity="severe",
        reading="non_finite",
        fires=not_finite,
        scope="first",
        worst="largest",
        sentence="Values that are NaN or infinite appear after {where} ({measured:percent} of "
        "them){later}; nothing can be read there.",
        paper="attoscope's own check",
        remedy="Restore the weights that are not finite from an earlier checkpoint. If all "
        "are finite, the values overflowed: run in bfloat16 or float32 instead of float16, "
        "and look at the growth of the stream before this point.",
        code="""\
import torch

for name, weight in model.named_parameters():
    if not torch.isfinite(weight).all():
        print(name, "is not finite: restore it from an earlier checkpoint")
model = model.to(torch.bfloat16)  # if all weights are finite and the model ran in float16
""",
        shown="non_finite",
    ),
    Rule(
        id="massive_channel",
        title="One channel drowns all others",
        severity="warning",
        reading="channel_share",
        fires=massive_channel,
        scope="run",
        worst="largest",
        sentence="After {where}, channel {channel} alone holds {measured:percent} of a content "
        "token's energy, where an even spread would give it {null:percent}.",
        paper="Kovaleva et al. 2021 (arXiv 2105.06990); Sun et al. 2024 (arXiv 2402.17762)",
        remedy="Find the weight that writes the channel and compare it with the channel's "
        "neighbours. Leave the channel out of cosines and norms, quantise it by itself, "
        "and when training, decay norm weights and biases, too.",
        code=_FIND_CHANNEL,
        shown="channel",
    ),
    Rule(
        id="outlier_channel",
        title="An outlier channel",
        severity="note",
        reading="channel_share",
        fires=outlier_channel,
        scope="run",
        worst="largest",
        sentence="After {where}, channel {channel} alone holds {measured:percent} of a content "
        "token's energy, where an even spread would give it {null:percent}.",
        paper="Kovaleva et al. 2021 (arXiv 2105.06990); Sun et al. 2024 (arXiv 2402.17762)",
        remedy="Found in working models, too. Leave the channel out of cosines and norms, and "
        "give it a range of its own when quantising.",
        code=_FIND_CHANNEL,
        shown="channel",
        unless=("massive_channel",),
    ),
    Rule(
        id="massive_activation",
        title="Massive activations",
        severity="note",
        reading="massive_activation",
        fires=massive_activation,
        scope="run",
        worst="largest",
        sentence="After {where}, {token} carries an activation {measured} times the median "
        "one, in channel {channel}.",
        paper="Sun et al. 2024 (arXiv 2402.17762)",
        remedy="Usual in trained language models, where it feeds an attention sink. Keep "
        "it out of averages over tokens, and give it a range of its own when quantising; "
        "do not run such a model in float16.",
        code="""\
hidden = model(**batch, output_hidden_states=True).hidden_states[-2].float().abs()
print("first token", hidden[:, 0].amax().item(), "others", hidden[:, 1:].amax().item())
""",
        shown="largest",
    ),
    Rule(
        id="idle_block",
        title="Blocks that do nothing",
        severity="warning",
        reading="update_ratio",
        fires=idle,
        scope="run",
        worst="smallest",
        sentence="{where} {n:changes|change} the stream by {measured:percent} of its norm, "
        "which is next to nothing.",
        paper="Men et al. 2024, ShortGPT (arXiv 2403.03853); Liu et al. 2020, Admin (arXiv "
        "2004.08249)",
        remedy="Check that the block's output weights were loaded and are not zero (some "
        "initialisers start them there). If training left it idle, remove it.",
        code="""\
for path in reversed($modules):
    layers, index = path.rsplit(".", 1)
    del model.get_submodule(layers)[int(index)]
    model.config.num_hidden_layers -= 1
""",
    ),
    Rule(
        id="exploding_stream",
        title="The stream explodes",
        severity="warning",
        reading="growth",
        fires=exploding,
        scope="run",
        worst="largest",
        sentence="In {where}, the stream grows up to {measured} times per block; adding one "
        "branch after the other, as skip connections do, would not even double it.",
        paper="Liu et al. 2020, Admin (arXiv 2004.08249); Kedia et al. 2024, DeepScaleLM "
        "(arXiv 2403.09635)",
        remedy="Scale the last weight of every residual branch by 1 / sqrt(2 × layers) at "
        "initialisation, or put a norm in front of each branch (pre-norm).",
        code="""\
last = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "output.dense")
for name, weight in model.named_parameters():
    if name.endswith(tuple(f"{part}.weight" for part in last)):
        weight.data.div_((2 * model.config.num_hidden_layers) ** 0.5)  # before training
""",
        # Where only the differences between tokens explode, that finding says more.
        unless=("sharpening_blow_up",),
    ),
)
