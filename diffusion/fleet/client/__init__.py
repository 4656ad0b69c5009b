"""The fleet from an owner's or operator's desk: HTTP with a token, folders packed and uploaded, jobs submitted."""
