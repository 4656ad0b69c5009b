"""The fleet from an owner's or operator's machine: HTTP with a token, folders packed and uploaded, jobs submitted."""
