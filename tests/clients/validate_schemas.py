"""Validates answers against their schemas. Argument: a file of JSON lines {"schema": ..., "text": ...}."""

import json
import sys

from jsonschema import Draft202012Validator


def main():
    num_valid = 0
    with open(sys.argv[1], encoding="utf-8") as lines:
        for line in lines:
            answer = json.loads(line)
            Draft202012Validator.check_schema(answer["schema"])
            validator = Draft202012Validator(answer["schema"])
            errors = list(validator.iter_errors(json.loads(answer["text"])))
            if errors:
                sys.exit(f"{answer['text']!r} under {answer['schema']}: {errors[0].message}")
            num_valid += 1
    print(f"{num_valid} answers are valid")


main()
