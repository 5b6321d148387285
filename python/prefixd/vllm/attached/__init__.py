"""Attached prefixes: requests whose stored prompt takes no blocks of the engine.

vLLM gives the attached tokens of such a request one marker for all of their blocks, a null block of
a number below 0 that only this request has (`spec`). Which requests are attached, and under which
policy, is decided in the scheduler's process (`scheduling`, `policy`). In a worker the attention
backend (`backend`) attends to the tokens that are in blocks, and prefixd to those of the prefix
(`attending`); the two states are merged.
"""
