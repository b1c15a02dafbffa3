"""Data whose truth is known: what attention should select is known before it is trained.

Arrays out, seeds in; nothing here knows of models. torch is imported only by the generators that
repeat published draws.
"""

from attoscope.tasks.instances import Instance as Instance
from attoscope.tasks.instances import stack as stack
from attoscope.tasks.next_token import NextTokenData as NextTokenData
from attoscope.tasks.next_token import next_token_contexts as next_token_contexts
from attoscope.tasks.noise import label_noise_tokens as label_noise_tokens
from attoscope.tasks.noise import two_token_signal_noise as two_token_signal_noise
from attoscope.tasks.official import equal_scores as equal_scores
from attoscope.tasks.official import lambda_head as lambda_head
from attoscope.tasks.official import relu_head as relu_head
from attoscope.tasks.official import unit_sphere as unit_sphere
from attoscope.tasks.official import vis1 as vis1
from attoscope.tasks.official import vis2 as vis2
from attoscope.tasks.prompts import prompt_sequences as prompt_sequences
from attoscope.tasks.prompts import single_prompt as single_prompt
from attoscope.tasks.recall import OCRTask as OCRTask
from attoscope.tasks.recall import out_of_context as out_of_context
