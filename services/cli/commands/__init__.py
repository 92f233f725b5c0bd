"""The commands of `bapo`: one module for each command or group of commands.

A module here is imported when its command is used, so it may import what the command needs. Only
torch, transformers, matplotlib and kfp, which take seconds, are imported within functions.
"""
