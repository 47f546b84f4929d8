"""Predicted steps beside measured ones, with real compute on local ranks."""
