"""The oracle against real training steps on this machine: strategies × networks × ranks.

python -m benchmarks.oracle_runs measure FOLDER    calibrate operators and transfers, run the steps, keep both
python -m benchmarks.oracle_runs predict FOLDER    predict the steps from the calibration alone, print every point
"""
