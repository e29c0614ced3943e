// A fake NVRTC: g++ compiles programs for the fake driver, with the flags of the emulator.
//
// FAKE_DIR is the folder of this file. FAKE_NVRTC_CODE names a folder that keeps compiled programs, if it is set.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

enum { SUCCESS = 0, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11 };

struct Program {
    std::string name, text, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

API nvrtcVersion(int* major, int* minor) {
    *major = 12, *minor = 9;
    return SUCCESS;
}
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR"; }
API nvrtcCreateProgram(Program** program, const char* text, const char* name, int num_headers, const char* const* headers,
                       const char* const* names) {
    *program = new Program{name, text, "", "", {}};
    for (int i = 0; i < num_headers; ++i) (*program)->headers.emplace_back(names[i], headers[i]);
    return SUCCESS;
}
API nvrtcDestroyProgram(Program** program) {
    delete std::exchange(*program, nullptr);
    return SUCCESS;
}
static std::string read(const std::string& file) {
    std::stringstream all;
    all << std::ifstream(file, std::ios::binary).rdbuf();
    return all.str();
}
API nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
    // Every module has its own copy of what a header defines.
    std::string flags = " -shared -fPIC -std=c++17 -O1 -w -fno-gnu-unique -fvisibility=hidden -ffp-contract=off "
                        "-DBATON_EMULATED -I" FAKE_DIR " -I" FAKE_DIR "/../cpp";
    bool is_known = false;
    for (int i = 0; i < num_options; ++i) {
        std::string option = options[i];
        is_known |= option == "--gpu-architecture=sm_90a";
        if (option.rfind("-D", 0) == 0) flags += " " + option;
    }
    if (!is_known) {
        program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)";
        return INVALID_OPTION;
    }
    // What affects the code, but for the files in FAKE_DIR: who names a folder for code has one for each of their states.
    std::string kept, inputs = program->name + flags + program->text;
    for (auto& [name, text] : program->headers) inputs += name + text;
    if (const char* folder = getenv("FAKE_NVRTC_CODE")) {
        kept = std::string(folder) + "/" + program->name + "-" + std::to_string(std::hash<std::string>()(inputs));
        program->code = read(kept);
        if (!program->code.empty()) return SUCCESS;
    }
    char made[] = "/tmp/fake-nvrtc-XXXXXX";
    if (!mkdtemp(made)) return INTERNAL_ERROR;
    std::string dir = made, file = dir + "/" + program->name, code = dir + "/code", log = dir + "/log";
    for (auto& [name, text] : program->headers) std::ofstream(dir + "/" + name) << text;
    std::ofstream(file) << program->text << "\n#include \"module.h\"\n";
    int status = system(("g++" + flags + " -I" + dir + " -x c++ " + file + " -o " + code + " 2> " + log).c_str());
    program->log = read(log);
    if (status == 0) program->code = read(code);
    if (status == 0 && !kept.empty()) {
        // Threads of a process compile the same program: the folder of a call has a name of its own, the process has not.
        std::string own = kept + "." + dir.substr(dir.size() - 6);
        std::ofstream(own, std::ios::binary) << program->code;
        if (rename(own.c_str(), kept.c_str()) != 0) return INTERNAL_ERROR;
    }
    bool is_gone = system(("rm -r " + dir).c_str()) == 0;
    return status != 0 ? COMPILATION : is_gone ? SUCCESS : INTERNAL_ERROR;
}
API nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return SUCCESS;
}
API nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}
API nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->code.size();
    return SUCCESS;
}
API nvrtcGetCUBIN(Program* program, char* code) {
    memcpy(code, program->code.data(), program->code.size());
    return SUCCESS;
}
