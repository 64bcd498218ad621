"""Schedules that are compiled from the steps that a job has measured."""
