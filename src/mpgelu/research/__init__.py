"""What the library is measured with: data sets, the paper's experiments, other methods, speed."""
