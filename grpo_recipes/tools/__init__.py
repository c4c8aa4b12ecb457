"""Turns of a completion that calls tools: bounded calls, the loop over turns, and the transcript."""
