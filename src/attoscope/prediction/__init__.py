"""What weights say about smoothing, signal and training along depth, beside what happens."""

from attoscope.prediction.amplifying import Amplification as Amplification
from attoscope.prediction.amplifying import OutputChange as OutputChange
from attoscope.prediction.amplifying import amplification as amplification
from attoscope.prediction.amplifying import output_change as output_change
from attoscope.prediction.amplifying import sublayer_gradient_norms as sublayer_gradient_norms
from attoscope.prediction.dependency import Dependency as Dependency
from attoscope.prediction.dependency import residual_dependency as residual_dependency
from attoscope.prediction.predicting import Prediction as Prediction
from attoscope.prediction.predicting import SmoothingPrediction as SmoothingPrediction
from attoscope.prediction.predicting import predict as predict
from attoscope.prediction.trainability import Trainability as Trainability
from attoscope.prediction.trainability import attention_trainability as attention_trainability
