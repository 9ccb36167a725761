"""Runs a study: Ray Tune schedules the trials, the records say what happened.

The run side. It joins strategies, sampler, training and tracking, and knows nothing of reports, rules or exports.
"""
