"""Files of samples that ranks can read in part: chunking, one writer per format, unfinished files."""
