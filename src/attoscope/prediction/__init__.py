"""What the weights and attention maps say about smoothing along depth, beside what happens."""

from attoscope.prediction.predicting import Prediction as Prediction
from attoscope.prediction.predicting import SmoothingPrediction as SmoothingPrediction
from attoscope.prediction.predicting import predict as predict
