"""Devices as their vendors describe them: rates and memory of each class, and times from these.

catalogue   device classes and their vendors' figures
roofline    counted kernels x catalogue -> times of a device that is not at hand
"""
