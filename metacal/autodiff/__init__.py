"""Derivatives along a direction, carried along a forward pass already made, and what autograd's graphs tell.

`tape.Tape` records a pass and gives J v; `plain` has arithmetic whose derivatives of every order are right.
"""
