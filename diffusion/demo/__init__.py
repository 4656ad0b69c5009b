"""The demo: the whole path on shapes that the repository draws itself, in minutes on two CPU cores.

__main__.py     the stages, each a command a user would type
judge.py        do the images show what the prompts name?
lora.py         teaches the demo's model a new word from six photos
fleet.py        twelve adapters by machines that fail
local_fleet.py  their service, storage and processes
crawl.py        the command that turns a small crawl into training data with a held-out part
"""
