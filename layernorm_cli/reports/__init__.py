"""Result records as text: tables for people, json, jsonl, csv and markdown for programs."""
