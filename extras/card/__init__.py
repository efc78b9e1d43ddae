"""The model card: RUN/model/README.md."""
