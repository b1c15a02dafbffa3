"""Remedies against tokens that become too alike with depth."""

from attoscope.remedies.losses import cosine_loss as cosine_loss
from attoscope.remedies.losses import local_contrastive_loss as local_contrastive_loss
from attoscope.remedies.losses import patch_contrastive_loss as patch_contrastive_loss
from attoscope.remedies.mixing import cutmix_on_patch_grid as cutmix_on_patch_grid
from attoscope.remedies.mixing import patch_mixing_loss as patch_mixing_loss
from attoscope.remedies.mixing import region_mixing_loss as region_mixing_loss
from attoscope.remedies.saving import load_treated as load_treated
from attoscope.remedies.stability import stability as stability
from attoscope.remedies.tokens import BlockTokens as BlockTokens
from attoscope.remedies.treating import treat as treat
from attoscope.remedies.treatment import Change as Change
from attoscope.remedies.treatment import Treatment as Treatment
from attoscope.remedies.treatment import treatments_of as treatments_of
