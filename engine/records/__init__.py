"""What a training writes for people: records, notes, pictures, files."""
