"""Moments of activations and gradients: closed forms of each component, and measured ones.

A leaf: nothing of a model is known here.
"""
