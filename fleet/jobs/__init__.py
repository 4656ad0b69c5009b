"""The contract of a job: what an owner may ask for, checked before a machine is paid for."""
