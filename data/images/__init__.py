"""Images as a data set: folders, tables, decoding, augmentation."""
