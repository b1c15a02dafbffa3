"""Renders what it is given: HTML, JSON, the terminal. Knows nothing of models.

Nothing is imported here, so that importing the package stays light; charts are loaded when a
page is drawn.
"""
