"""The demos: lists of stages on images that the repository draws itself, in minutes on two CPU cores.

__main__.py  the whole path, each stage a command that a user would type
judge.py     do the images show what the prompts name?
lora.py      teaches the demo's model a new word from six photos
fleet.py     twelve adapters by machines of which one is killed
crawl.py     the command that turns a small crawl into training data with a held-out part
"""
