"""Runs an answer, compares it with the reference and says what is wrong; knows no exercise."""
