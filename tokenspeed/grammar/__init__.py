"""Constraints compiled to matchers that say, token by token, what may come next. Runs in the engine process.

The event loop asks for a compilation and gets an object to hand on; the forward thread asks that object for a matcher.
Neither imports this room: the protocols they know stand in tokenspeed/device/handle.py and tokenspeed/engine/held.py.
Nothing here imports torch, and llguidance and the tokenizer only load at the first constrained request.
"""
