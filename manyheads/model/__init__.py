"""Whole models: one stack of transformer layers, one recurrent network, one n-gram network, one decoding protocol."""
