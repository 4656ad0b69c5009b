"""Service that machines, owners and operators of a fleet talk to: HTTP over the queue, signed URLs, a page, metrics, notices."""
