-- The databases of MLflow's and Prefect's servers; both make their tables themselves.
CREATE DATABASE mlflow;
CREATE DATABASE prefect;
