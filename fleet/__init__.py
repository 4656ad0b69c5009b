"""Many small jobs on machines that may vanish: one queue, leases with fencing tokens, workers without keys. No torch.

docs/fleet.md leads from nothing to a running fleet. `jobs` is the contract, `policies` decides, `queue` remembers, `service` answers,
`worker` and `attempts` do the work.
"""
